"""The version, in a module that imports nothing: the build reads it, and so do modules that the package itself imports."""

__version__ = "0.2.0.dev0"
