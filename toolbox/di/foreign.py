"""Providers of other `dependency_injector` containers as beans of ours."""
