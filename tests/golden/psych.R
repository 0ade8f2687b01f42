# Golden numbers for fedstat's factor analysis, from R's psych.
#   Rscript tests/golden/psych.R tests/golden/psych.json
# psych::fa is run with a tight min.err so that both programs stand at the fixed point; psych's "minres" stops at
# optim's default tolerance, hence its wider tolerance. fa.parallel is random: its means carry a Monte Carlo tolerance.
suppressMessages({library(psych); library(jsonlite)})
out <- commandArgs(trailingOnly = TRUE)[1]

case <- function(name, r, n_obs, n_factors, source) {
  r <- unname(as.matrix(r)); r <- (r + t(r)) / 2
  tight <- list(r = r, nfactors = n_factors, n.obs = n_obs, SMC = FALSE, rotate = "none")
  pa <- do.call(fa, c(tight, fm = "pa", min.err = 1e-14, max.iter = 20000))
  minres <- do.call(fa, c(tight, fm = "minres"))
  list(
    name = name, source = source, n_obs = n_obs, n_factors = n_factors, r = r,
    eigenvalues = pa$e.values,
    pa = list(
      communality = unname(pa$communality), complexity = unname(pa$complexity),
      ss_loadings = unname(pa$Vaccounted["SS loadings", ]), n_iter = length(pa$communality.iterations),
      r2_scores = unname(pa$R2.scores),
      chi2 = pa$STATISTIC, df = pa$dof, p_value = pa$PVAL, null_chi2 = pa$null.chisq, null_df = pa$null.dof,
      tli = pa$TLI, rmsea = unname(pa$RMSEA[1:3]), bic = pa$BIC, sabic = pa$SABIC, rmsr = pa$rms, crms = pa$crms,
      empirical_chi2 = pa$chi, fit_off = pa$fit.off
    ),
    minres = list(communality = unname(minres$communality)),
    kmo = KMO(r)$MSA, kmo_unit = unname(KMO(r)$MSAi),
    bartlett = {b <- cortest.bartlett(r, n = n_obs); list(chi2 = b$chisq, df = b$df, p_value = b$p.value)},
    map = suppressMessages(vss(r, n = min(8, ncol(r) - 1), n.obs = n_obs, plot = FALSE, rotate = "none", fm = "pc"))$map
  )
}

parallel_case <- function(name, r, n_obs) {
  set.seed(1)
  r <- unname(as.matrix(r))
  p <- suppressMessages(fa.parallel(r, n.obs = n_obs, fa = "both", fm = "pa", SMC = TRUE, n.iter = 400, plot = FALSE,
                                    quant = .95, sim = TRUE))
  list(name = name, n_obs = n_obs, n_iter = 400, n_components = p$ncomp, n_factors = p$nfact,
       pc_mean = unname(colMeans(p$values[, grep("^C", colnames(p$values))])),
       fa_95 = unname(apply(p$values[, grep("^F", colnames(p$values))], 2, quantile, .95)),
       fa_values = p$fa.values,
       pc_95 = unname(apply(p$values[, grep("^C", colnames(p$values))], 2, quantile, .95)))
}

bfi_r <- cor(bfi[, 1:25], use = "pairwise")
cases <- list(
  case("harman24", Harman74.cor$cov, 145, 4, "datasets::Harman74.cor"),
  case("bfi", bfi_r, 2800, 5, "psych::bfi, pairwise correlations of items 1 to 25"),
  case("thurstone", Thurstone, 213, 3, "psych::Thurstone"),
  case("holzinger", Holzinger, 355, 3, "psych::Holzinger"),
  case("bechtoldt", Bechtoldt, 213, 4, "psych::Bechtoldt"),
  case("reise", Reise, 1000, 5, "psych::Reise"),
  case("ability16", cor(iris[, 1:4]), 150, 1, "datasets::iris, one factor")
)
cases[[7]]$name <- "iris"
rotate <- function(method) {
  f <- fa(Harman74.cor$cov, 4, fm = "pa", SMC = FALSE, rotate = method, min.err = 1e-14, max.iter = 20000)
  list(communality = unname(f$communality), phi = if (is.null(f$Phi)) NULL else unname(f$Phi))
}
write_json(list(
  versions = list(R = R.version.string, psych = as.character(packageVersion("psych")),
                  GPArotation = as.character(packageVersion("GPArotation"))),
  generator = "tests/golden/psych.R",
  tolerance = list(pa = 1e-8, minres = 1e-3, index = 1e-6, rmsea = 1e-4, parallel = 0.05),
  cases = cases,
  rotations = list(varimax = rotate("varimax"), oblimin = rotate("oblimin"), promax = rotate("promax")),
  parallel = list(parallel_case("harman24", Harman74.cor$cov, 145), parallel_case("bfi", bfi_r, 2800))
), out, digits = NA, auto_unbox = TRUE, null = "null")
