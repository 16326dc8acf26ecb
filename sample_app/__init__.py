"""The weather agent: what a program written with toolbox looks like. Start at `weather`, then `application`.

Beside it: `bookings`, an agent on a database, and `experts`, services that are tools of a service (`support`).
"""
