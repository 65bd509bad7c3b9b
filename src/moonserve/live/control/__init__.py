"""The control side of a gateway: the loop around the Conductor, joins, peers, and the admin API."""
