"""What vectors may do: certificate, audit, guard, and how strong they may be."""
