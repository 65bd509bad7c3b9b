"""Who is there: the Registry port over etcd, and what is kept under which key."""
