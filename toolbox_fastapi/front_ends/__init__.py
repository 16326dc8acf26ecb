"""What the protocols of front ends share: reading the events of a run, and the chats to which runs belong.

Not here: the protocols themselves (`vercel_ai`, `ag_ui`).
"""
