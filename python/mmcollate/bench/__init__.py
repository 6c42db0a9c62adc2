"""The benchmarks: ``python -m mmcollate bench``.

All arms of a row run in one process on the same items, turn by turn in random order, torch at one
thread, what they return destroyed inside the timing. Before a row is timed, each arm's result is
compared with vLLM's own (without vLLM: with the reference's); a row where one differs is refused.
"""
