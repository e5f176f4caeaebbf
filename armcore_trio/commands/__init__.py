"""One module a command. The daemon imports none of them."""
