"""ARPO's expansion (arXiv 2507.19849) at the granularity of turns: branch where the policy is surprised by a reply.

A rollout that has just sampled a turn t below an environment's reply branches with score

    P = alpha + beta (H_t - H_first)        and does so when P > tau

H is the policy's uncertainty at the beginning of a turn, H_first that of the first turn on the same path. A branch is
one continuation at the turn's parent: the state, reply included, from which the surprising tokens were sampled. So
each turn of a source, root rollout or branch, adds at most one; the budget may end them earlier. What is left when the
last root rollout ends becomes fresh rollouts from the prompt.

Three differences to the paper. H there is the entropy over a few tokens; an engine reports the log-probabilities of
sampled tokens only, and the mean surprisal -log p of the first `tokens` of a turn is its one-sample estimate: unbiased
for each token, noisier. H here is in nats per token; there it is divided by the log of the vocabulary, which no
allocator knows. The unit only scales beta, and with the default alpha = tau any beta > 0 gives the same rule: branch
when H rose. And the released code tosses a coin with a probability near P instead of comparing P with tau; this
follows the paper.

A warning about credit. The turn that was surprised is selected by a statistic of its own sample, so it is not
exchangeable with the fresh siblings that its branch brings: at equal states a surprising sample tends to be a worse one
(measured in SIPO, a follow-up of AT2PO, arXiv 2601.04767). The branch itself is a fresh sample of its state and marked
CONTINUATION; an estimator that compares it with the turn that called for it inherits that bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, Turn
from trace_async.errors import ConfigError
from trace_async.methods.growth_rules import RootRollouts, continuations, num_roots_ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ArpoOptions:
    """Options of `arpo`."""

    alpha: float = 0.5  # score of a branch when uncertainty has not moved
    beta: float = 0.2  # what a nat per token more adds to it
    tau: float = 0.5  # branch above this score
    tokens: int = 20  # from the beginning of a turn, over which its uncertainty is measured

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tree.options.tokens must be at least 1, got {self.tokens}")


class ArpoAllocator(RootRollouts):
    """Branches below surprising replies while the budget lasts; the rest becomes rollouts from the prompt."""

    def __init__(self, options: ArpoOptions) -> None:
        self._options = options

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """The rollout goes on, and branches at the turn's parent when it was surprised."""
        return super().on_turn(tree, node_id) + self._branch(tree, node_id)

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """A branch below the last turn's parent; with the last root rollout everything that is left, at the prompt."""
        grants = self._branch(tree, node_id)
        if num_roots_ended(tree, node_id) == tree.budget.roots:
            rest = tree.continuations_left - len(grants)
            return continuations({ROOT: rest}) + grants
        return grants

    def _branch(self, tree: TurnTree, node_id: int) -> list[Grant]:
        node = tree.nodes[node_id]
        if not tree.can_branch or tree.continuations_left == 0 or node.parent == ROOT:
            return []
        turn, first = node.turn, tree.nodes[tree.ancestors(node_id)[-2]].turn
        if turn is None or first is None:  # the turn could not be played
            return []
        rise = self._surprisal(turn) - self._surprisal(first)
        if self._options.alpha + self._options.beta * rise <= self._options.tau:
            return []
        return continuations({node.parent: 1})

    def _surprisal(self, turn: Turn) -> float:
        """Mean -log p of a turn's first tokens, in nats."""
        return -float(turn.action_logprobs[: self._options.tokens].mean())
