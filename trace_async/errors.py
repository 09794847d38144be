"""The exception family, drawn once.

    TraceAsyncError
    ├── UserError              the caller's mistake: says what is wrong and the cure; exit code 2
    │   ├── ConfigError        a key, value or combination that the configuration refuses
    │   ├── TemplateError      a chat template that is not prefix-stable
    │   └── PolicyError        a policy folder or weight file that cannot be used
    ├── Recoverable            one node, group or lease fails; the run goes on
    │   ├── EngineError        the engine could not answer a request
    │   ├── EnvironmentFailure the environment's infrastructure failed; never a reward of zero
    │   │   └── EnvironmentTimeout   ... by missing its deadline
    │   └── PredictorError     no score could be had
    ├── WireError              frames that are not what the schema says; the sender is told, the frames are dropped
    ├── RankError              a process that trains along with this one was lost; ends the run
    └── InvariantError         a promise of the design does not hold; ends the run with the ids

`Recoverable` is caught in one place (`expansion.py`) and becomes a FAILED node. Everything else crosses its
TaskGroup. Environments may raise plain Python errors; `turns.py` wraps them as `EnvironmentFailure` with the cause.
"""


class TraceAsyncError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(TraceAsyncError):
    """The caller's mistake; the message names the cure."""


class ConfigError(UserError):
    """A configuration key, value or combination is refused."""


class TemplateError(UserError):
    """A chat template does not keep earlier tokens when a conversation grows."""


class PolicyError(UserError):
    """A policy folder or weight file cannot be used."""


class Recoverable(TraceAsyncError):
    """One node, group or lease fails; the run goes on."""


class EngineError(Recoverable):
    """The engine could not answer a request."""


class EnvironmentFailure(Recoverable):
    """The environment's infrastructure failed."""


class EnvironmentTimeout(EnvironmentFailure):
    """The environment missed its deadline."""


class PredictorError(Recoverable):
    """The predictor could not score a prefix."""


class WireError(TraceAsyncError):
    """Frames that do not follow the schema."""


class RankError(TraceAsyncError):
    """A process that trains along with this one was lost."""


class InvariantError(TraceAsyncError):
    """A promise of the design does not hold."""
