"""The Megatron-core actor. The only room that imports megatron."""
