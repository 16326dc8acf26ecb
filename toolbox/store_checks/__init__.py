"""Checks that every store passes: stores of runs (`run_stores`) and of conversations (`conversation_stores`).

Each check is an async function that gets a function which creates stores, and raises `AssertionError`. Programs get the
checks from `toolbox.testing`. Not here: what only one kind of database promises.
"""

PATIENCE = 60.0
"""Seconds after which something that must happen has not happened."""
DISTINCT_TEXTS = ("", " ", "a:b", "a/b", "../x", "x", "X", "{x}", "}", "%s", "'; --", "日本", "é", "e\u0301")
"""Texts of ids that a careless store mixes up, or cannot use as a name."""
