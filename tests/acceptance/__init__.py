"""Real worker and beat processes, killed, frozen, cut off, with wrong clocks."""
