"""The model catalogue: one TOML card per model, data only."""
