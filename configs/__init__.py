"""Every config struct beside the presets that fill it."""
