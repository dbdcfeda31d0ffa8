"""Values that follow from several keys, as pure functions of the config: which transport `auto` means, who needs a key.

Roles and the launcher call them, so that both derive the same value; nothing is written back into the config. A new one
goes into the file of the section that it belongs to.
"""
