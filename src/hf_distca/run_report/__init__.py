"""What a run left in its folder, as one page that needs nothing else. It needs no torch."""
