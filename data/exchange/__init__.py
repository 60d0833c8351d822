"""What leaves a root and comes into it: bundles, exports, files of other tools."""
