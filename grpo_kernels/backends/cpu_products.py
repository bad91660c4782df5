def available(): return "not built"
