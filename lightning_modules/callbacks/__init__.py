"""Side effects of training: guards, progress, exports, publishing."""
