"""The role between the rollout fleet and the actor: one asyncio process behind an HTTP app."""
