"""What spans hosts: the connection to Ray, typed calls of actors, and the checks of nodes."""
