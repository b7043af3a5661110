"""Windows: clock -> slot -> fire -> runs -> history (maintain)."""
