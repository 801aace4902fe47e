"""Prefect tasks: thin bodies around one library call each."""
