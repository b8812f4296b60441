"""Settings: `schema` says what there is, `load` reads files and overrides, `check` refuses contradictions."""
