"""The engine on the screen: what is read of it, and the panel, strip and full screen that show it."""
