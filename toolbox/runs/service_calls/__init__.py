"""A call of a service as the body of a run: the only part of `runs` that knows services.

- `service_body` answers what a run asks of its body (`runs.run_body`), such as what it leaves in its conversation, and
  executes the method.
- `new_calls` makes the run of a new call; `call_documents` has its JSON.
- `run_layers`, `run_invocations` and `tool_records` record and replay what happens while it runs; `record_contents` has
  their JSON.
- `pending_calls`, `answered_calls` and `stored_calls` are for calls that wait, and for those of other programs.
- `call_checks` checks methods at start.

Not here: what is the same for any body.
"""
