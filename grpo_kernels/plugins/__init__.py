"""Plugins that a trainer's configuration names, so that none of its code has to change; see docs/adoption.md.

Importing other modules of this package changes nothing in a trainer. Importing a plugin does, or the trainer calls the plugin's
function when it starts: naming it in the configuration asks for that. Each plugin acts once per process, even if it is imported
several times or under several names, and logs one line about what it did."""
