"""Operations: for each a torch reference (what), a Triton kernel (how) and a launcher (which of them runs)."""
