"""What a run needs, computed from its settings: memory, FLOPs, time. Imports settings only, and no torch."""
