"""What trials run in their processes."""

import os
import time


def add(a, b=1):
    return a + b


def spoil(message):
    raise ValueError(message)


def sleep(seconds):
    time.sleep(seconds)


def die():
    os._exit(9)


def process():
    return os.getpid()
