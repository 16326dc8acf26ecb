"""A call of a service as the body of a run: the only part of `runs` that knows services.

Not here: what a run asks of its body (`runs.run_body`), and everything that is the same for any body.
"""
