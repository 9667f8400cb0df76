"""The file contracts: analysis and plan, their schemas, writers, readers, content hashes and checks.

The only room that planner and runtime share, so it imports pyarrow and numpy and nothing heavier.
"""
