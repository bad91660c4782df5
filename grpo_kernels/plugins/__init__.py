"""What a trainer's configuration names, so that no line of its code changes: docs/adoption.md.

Other modules of this package change nothing of a trainer's when they are imported. These do, or are functions that the trainer
calls at its start: naming one is the request. Each acts once in a process, however often and under whatever name it is imported,
and says in one line what it did."""
