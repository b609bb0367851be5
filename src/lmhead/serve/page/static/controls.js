// The sampling controls as sliders and switches: what each is called, and how far it goes.

export const CONTROLS = {
  logit_bias: { title: "Logit bias", about: "added to single tokens; set by the buttons beside them" },
  banned_ids: { title: "Banned tokens", about: "set by the buttons beside the tokens" },
  allowed_ids: { title: "Allowed tokens", about: "from Python and the command line" },
  min_tokens: {
    title: "No early end", about: "no end of text in the first tokens",
    fields: { min_tokens: ["tokens", 0, 64, 1] },
  },
  repetition_penalty: {
    title: "Repetition penalty", about: "tokens of prompt and output",
    fields: { repetition_penalty: ["factor", 0.5, 2, 0.01] },
  },
  frequency_penalty: {
    title: "Frequency penalty", about: "for each time in the output",
    fields: { frequency_penalty: ["logits", -2, 2, 0.05] },
  },
  presence_penalty: {
    title: "Presence penalty", about: "once, for tokens of the output",
    fields: { presence_penalty: ["logits", -2, 2, 0.05] },
  },
  no_repeat_ngram: {
    title: "No repeated n-gram", about: "runs of n tokens come once",
    fields: { no_repeat_ngram_size: ["n", 0, 10, 1] },
  },
  dry: {
    title: "DRY", about: "against long repeats",
    fields: {
      dry_multiplier: ["multiplier", 0, 5, 0.05],
      dry_base: ["base", 1, 4, 0.05],
      dry_allowed_length: ["allowed length", 1, 10, 1],
    },
  },
  temperature: {
    title: "Temperature", about: "0 takes the best token",
    fields: {
      temperature: ["temperature", 0, 2, 0.01],
      dynatemp_range: ["dynamic range", 0, 2, 0.05],
      dynatemp_exponent: ["exponent", 0, 4, 0.1],
    },
  },
  top_n_sigma: {
    title: "Top n sigma", about: "within n standard deviations of the best",
    fields: { top_n_sigma: ["n", 0, 6, 0.05] },
  },
  top_k: {
    title: "Top k", about: "the k best",
    fields: { top_k: ["k", 0, 2000, 1, "log"] },
  },
  top_p: {
    title: "Top p", about: "the best that hold p together",
    fields: { top_p: ["p", 0, 1, 0.005] },
  },
  min_p: {
    title: "Min p", about: "at least p times the best",
    fields: { min_p: ["p", 0, 1, 0.001, "log"] },
  },
  typical_p: {
    title: "Typical p", about: "nearest to the entropy",
    fields: { typical_p: ["p", 0.01, 1, 0.01] },
  },
  epsilon: {
    title: "Epsilon", about: "at least this probability",
    fields: { epsilon_cutoff: ["cutoff", 0, 0.1, 0.0001, "log"] },
  },
  eta: {
    title: "Eta", about: "epsilon that follows the entropy",
    fields: { eta_cutoff: ["cutoff", 0, 0.1, 0.0001, "log"] },
  },
  xtc: {
    title: "XTC", about: "shown as when it strikes",
    fields: {
      xtc_probability: ["probability", 0, 1, 0.01],
      xtc_threshold: ["threshold", 0, 0.5, 0.005],
    },
  },
  mirostat: {
    title: "Mirostat 2", about: "the first step of its feedback",
    fields: { mirostat_tau: ["tau", 0, 10, 0.1] }, switch: "mirostat",
  },
};
