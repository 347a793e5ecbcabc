"""Where bytes go: extents, arenas, pieces, slices. Pure numpy: no file, thread, torch or ctypes."""
