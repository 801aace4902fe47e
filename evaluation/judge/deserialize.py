"""Inputs as EvalPlus means them: JSON lists become tuples, sets and complex numbers by task id."""

from typing import Any

from evalplus.data.mbpp import mbpp_deserialize_inputs


def inputs(problem_id: str, raw: Any) -> list[Any]:
    """Return the argument lists of a suite; Mbpp/793's plus suite is an empty object: no tests."""
    if not raw:
        return []
    return mbpp_deserialize_inputs(problem_id, raw) if problem_id.startswith("Mbpp/") else list(raw)
