"""The command `colibri`: one name for the verbs of all installed Colibri packages."""
