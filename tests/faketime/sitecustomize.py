"""Loaded by processes that run under libfaketime (tests.processes.shifted_clock): sleeping works there too.

libfaketime up to 0.9.10 (Debian 12, Ubuntu 24.04) hands clock_nanosleep, which time.sleep calls since
Python 3.11, a deadline that the kernel refuses (EINVAL) when the monotonic clock is left alone. With the
monotonic clock shifted as well, Event.wait never returns. select() is right under both.
"""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = sleep
