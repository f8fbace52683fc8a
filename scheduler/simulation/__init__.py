"""The whole scheduler in one thread, in virtual time: the production core, loop and sensors, a
journal in memory, the fake engine, and a disk and a clock that cost nothing but numbers.
"""
