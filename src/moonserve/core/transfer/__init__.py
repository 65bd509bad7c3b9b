"""The rules of the Transfer Engine: which slice goes over which lane, and which lanes are used."""
