"""Answer checking. Imports no torch."""
