"""A sample program written with toolbox: a weather agent. Start reading in `weather`, then `application`.

It also contains `bookings`, an agent with a database, and `experts`, AI services that are tools of another one.
"""
