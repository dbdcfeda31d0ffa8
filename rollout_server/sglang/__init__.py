"""The process around an SGLang server. Nothing of ours runs inside SGLang itself."""
