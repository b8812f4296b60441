"""Problems and prompts. Imports no torch."""
