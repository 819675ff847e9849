"""Paged attention in Metal: K and V of decode and verify rows are read where they lie.

source.py what runs on the GPU, launch.py how it is called, tables.py which rows of a step take it,
check.py whether it may be used.
"""
