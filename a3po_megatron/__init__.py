"""Asynchronous reinforcement learning of language models, A-3PO style: a Megatron-core actor and a vLLM rollout fleet."""
