"""The dev UI: a page that shows a program's services, tools and beans, and tries them. In development only.

Nothing here is imported before `install(app, container, dev_ui=…)` asks for it, but for `access`.
"""
