"""The weather agent: what a program written with toolbox looks like. Start at `weather`, then `application`."""
