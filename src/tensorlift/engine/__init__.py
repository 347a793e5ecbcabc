"""The native engine seen from Python: library and ABI, sizing, one class that runs a plan."""
