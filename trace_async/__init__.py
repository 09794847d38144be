"""Asynchronous actor-learner reinforcement learning of LLM agents on tree-structured rollouts."""

__version__ = "0.1.0"
