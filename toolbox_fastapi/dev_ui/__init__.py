"""The dev UI: a page for development that shows a program's services, tools and beans, and calls them.

Except for `access`, nothing here is imported before `install(app, container, dev_ui=…)` needs it.
"""
