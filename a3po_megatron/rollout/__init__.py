"""The rollout fleet: what runs inside vLLM, its supervisor on each node, and the controller's view of all of them."""
