"""Who is there: the Registry port in memory and over etcd, and what is kept under which key."""
